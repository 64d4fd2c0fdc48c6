"""Commands at which a person sits, or that hand a policy on: play, chat, export."""
