"""Ground floor: opaque pages under opaque keys, kept in tiers below the GPU."""
