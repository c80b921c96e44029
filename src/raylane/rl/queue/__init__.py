"""A bounded queue of trajectories: tickets go through an actor, payloads stay in shared memory of their host."""
