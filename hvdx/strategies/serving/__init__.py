"""The asynchronous parameter server: the weights lie in parts at servers, which workers push to and pull from."""
