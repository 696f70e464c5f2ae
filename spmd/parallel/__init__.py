"""What a layer does over several devices by itself: the forms of parallelism that a sharding constraint cannot say."""
