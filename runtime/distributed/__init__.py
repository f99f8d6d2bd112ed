"""Several ranks compute one model: their group, and the plans that rank 0 sends to the others."""
