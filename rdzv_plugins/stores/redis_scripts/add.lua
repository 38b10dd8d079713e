-- Add ARGV[3] to the counter ARGV[1], with the tag ARGV[2]; the sum, or nothing: it is no counter.
local stored, id = read(ARGV[1])
-- Redis counts in 64 bits, Lua in 53.
redis.call('HSET', hash, '#t', stored and string.sub(stored, #id + 2) or '0')
local counted = redis.pcall('HINCRBY', hash, '#t', ARGV[3])
local sum = redis.call('HGET', hash, '#t')
redis.call('HDEL', hash, '#t')
if type(counted) == 'table' then return false end
write(KEYS[2], ARGV[1], ARGV[2], sum)
return sum
