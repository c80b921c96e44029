"""Memory in which weights lie: slots of versions, a user's tensors, and copies between them."""
