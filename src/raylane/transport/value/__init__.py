"""Values as they travel: leaves, their memory, tickets, and the checks of their content."""
