"""The endpoints: each translates a request into one call, and its result into the answer."""
