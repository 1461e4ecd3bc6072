"""Train steps compiled for accelerators that are not there, and what they would cost."""
