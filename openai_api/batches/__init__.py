"""Files that clients upload, and batches of requests that are answered from them."""
