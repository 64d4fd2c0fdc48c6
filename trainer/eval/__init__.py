"""What a run measures and writes: its folder, its metrics, and how certain its figures are."""
