"""The shared language of mtplx: errors, job, messages, wire, clients, settings, command line."""
