"""Pages of the KV pool and the prefix tree over them; only `manager` writes to pages and tree."""
