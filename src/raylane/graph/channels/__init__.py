"""How values travel along edges: rings and leased buffers within a host, hops between hosts."""
