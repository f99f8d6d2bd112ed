"""What both APIs and the offline engine mean by what they ask; no HTTP, no torch."""
