"""`make gpu`: what the device handlers do on the GPU of this machine, correctness first. docs/cuda.md says how to read it."""
