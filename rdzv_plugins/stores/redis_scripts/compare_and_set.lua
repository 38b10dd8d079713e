-- Write the value ARGV[4] of the key ARGV[1], with the tag ARGV[3], if it has the tag ARGV[2] ("":
-- if it is absent). The new id in a list; else what is stored.
local stored, _, tag = read(ARGV[1])
if tag ~= ARGV[2] then return stored end
return {write(KEYS[2], ARGV[1], ARGV[3], ARGV[4])}
