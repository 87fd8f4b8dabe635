"""The language between gateway and engines: messages and framing. The only part of `backends` a gateway imports."""
