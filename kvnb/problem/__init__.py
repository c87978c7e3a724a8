"""What is copied: cases, grids, slots, inputs."""
