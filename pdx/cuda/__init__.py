"""The CUDA driver, as far as PDX needs it: GPUs, memory that other processes can map, copies, page-locking."""
