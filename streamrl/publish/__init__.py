"""How new weights get from the learner to the servers: transports behind one interface."""
