"""What a person sits at: a game to play, a policy to ask."""
