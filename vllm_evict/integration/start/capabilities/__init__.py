"""Which policies a server can run: features of a policy do not run in some environments, which are parts of a server.

`config.features` has the features, a row each, and those that do not go together in one policy.

| module | has |
|---|---|
| `environments` | what a server may be, a row each: what it cannot stand, why, and the way out |
| `drafting` | rows of servers that draft |
| `server` | facts of a server, by which rows apply |
| `refuse` | refuses servers of which two rows do not go together, at configuration and once layers are loaded |
| `of_layers` | refuses layers by their sizes and attributes, of which no configuration tells |
"""
