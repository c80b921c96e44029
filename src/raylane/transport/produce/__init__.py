"""Publication of values by methods, puts, graph edges and Ray's own direct transport."""
