"""What engines of others expect of draft trees. Each module is written for one release of one engine and imports none of it."""
