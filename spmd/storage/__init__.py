"""Object stores: addresses, small objects with conditional writes, and mirrored folders."""
