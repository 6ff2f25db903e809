"""What a user sets: values as they are written, the keys of a configuration, and their sources."""

from tierkv.config.sizes import SIZE_BYTES_MAX, format_size, parse_size

__all__ = ["SIZE_BYTES_MAX", "format_size", "parse_size"]
