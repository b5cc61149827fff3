"""Large bytes: handles on memory of other processes, and the roads on which it travels. Knows no message and no mesh."""
