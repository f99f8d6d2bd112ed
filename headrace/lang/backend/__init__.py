"""Back ends, which run a program's generations: one file each."""
