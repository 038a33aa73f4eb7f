"""Does `tune verify` find what is wrong, name it rightly, and leave alone what is right?"""
