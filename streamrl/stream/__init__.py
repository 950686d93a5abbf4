"""The wire: typed messages, the encoding of groups, and the ZeroMQ sockets that carry both."""
