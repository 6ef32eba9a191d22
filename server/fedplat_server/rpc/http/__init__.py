"""The services over HTTP/1.1, for networks that let no HTTP/2 through: an adapter to the handlers of gRPC's calls."""
