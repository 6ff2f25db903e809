"""Sizes as users write them."""

import pytest

from tierkv.config import SIZE_BYTES_MAX, format_size, parse_size
from tierkv.storage.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("20GiB", 20 * 2**30),
        ("20gib", 20 * 2**30),
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5 KiB", 1536),
        (" 3 TB ", 3 * 10**12),
        ("0.0001KiB", 0),
        (str(SIZE_BYTES_MAX), SIZE_BYTES_MAX),
    ],
)
def test_sizes_are_exact(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "20G", "1e9", "0x10", "1,5GiB", "1.GiB", "nan", "20GiBs", "٣GiB"]
)
def test_bad_size_names_option_and_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="--pool: expected a size such as 20GiB") as caught:
        parse_size(text, "--pool")
    assert "\n" not in str(caught.value)


def test_size_above_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most"):
        parse_size(str(SIZE_BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (20 * 2**30, "20.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_sizes_print_in_powers_of_1024(size: int, text: str) -> None:
    assert format_size(size) == text
