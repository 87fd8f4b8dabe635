"""What is wrong, why, and what to do: of the gateway, and of the way from a client to it.

One function a check, pure: facts in, findings out. `fetch` alone opens connections. Knows only the HTTP side of the
gateway and the clients' settings files.
"""
