"""Request traces against the real engine: what is found in the cache, with how much memory and which policy."""
