"""Large values: layouts, shared memory, memory of other processes, data paths. Independent of messages and meshes."""
