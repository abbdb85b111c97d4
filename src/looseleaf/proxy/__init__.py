"""A proxy that speaks the server's HTTP API in front of several servers.

`Forwarder` needs only the small protocol `Fleet`. The command ``looseleaf route`` implements it
over HTTP, and `looseleaf.ray` over Ray Serve."""
