"""The KV cache's pages and the prefix tree that finds them; only `CacheManager` changes them."""
