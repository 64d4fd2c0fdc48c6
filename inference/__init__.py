"""Engines that turn token ids into the policy's next tokens, and the protocol they share."""
