"""What one layer does on several devices: attention over a split sequence, and the kernels underneath."""
