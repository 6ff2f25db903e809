"""Maps the three top-level folders into one import package.

`engine/` installs as `tierkv.engine` and `storage/` as `tierkv.storage`; docs/adr/0001 says why.
The folders are discovered, never listed by hand, so that a new subpackage cannot be lost.
"""

from setuptools import find_packages, setup

packages = find_packages(
    ".",
    include=["tierkv", "tierkv.*"],
    # The committed links tierkv/engine and tierkv/storage serve type checkers only.
    exclude=["tierkv.engine", "tierkv.engine.*", "tierkv.storage", "tierkv.storage.*"],
)
for folder in ("engine", "storage"):
    packages += [f"tierkv.{name}" for name in find_packages(".", include=[folder, f"{folder}.*"])]

setup(
    packages=packages,
    package_dir={"tierkv.engine": "engine", "tierkv.storage": "storage"},
    package_data={"tierkv": ["py.typed"]},
)
