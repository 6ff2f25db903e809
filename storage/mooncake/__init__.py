"""An existing Mooncake Store as the remote tier (docs/formats/mooncake.md). Extra `[mooncake]`."""
