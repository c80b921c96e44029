"""Plan of a graph: tasks, values, edges, order and routes. Pure."""
