"""What is wrong with a user's data, where, and the repair: detection over surveys is pure, reading and writing apart.

`diagnosis` finds, `repairs` mends a copy; `findings` lists the kinds of trouble.
"""
