"""What do the other ranks say when one of four fails?"""
