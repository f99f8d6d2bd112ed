"""What runs a program's generations: one file each."""
