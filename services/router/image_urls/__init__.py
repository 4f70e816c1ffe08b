"""Images that a client names by URL, downloaded by the router where its operator allows it."""
