"""Pages of the KV pool and the prefix tree over them; `manager` is the only writer of both."""
