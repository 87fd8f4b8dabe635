"""What gateway and engines share: messages, framing, names of models. The only part of `backends` a gateway imports."""
