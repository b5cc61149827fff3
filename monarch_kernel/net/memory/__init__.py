"""Large values: layouts, shared memory, memory of other processes, data paths between them. Knows no message and no mesh."""
