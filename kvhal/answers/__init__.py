"""What can be said without a device: plans in bytes, explanations, the matrix, its CI jobs; and `probe`."""
