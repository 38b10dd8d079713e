-- Mark the key ARGV[1] as waited for, and put its value into its stream if its id is not ARGV[2].
-- The id; "": it is absent.
redis.call('HSET', hash, '!' .. ARGV[1], '1')
-- A run without a write expires by itself; the first write removes this deadline.
if redis.call('HEXISTS', hash, '#n') == 0 then redis.call('EXPIRE', hash, 60) end
local stored, id, tag = read(ARGV[1])
-- A stream may outlive its run, or its key, by some seconds.
local sent = redis.pcall('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
-- It may be of another type, and is nobody's then.
if sent.err and string.find(sent.err, 'WRONGTYPE') then redis.call('DEL', KEYS[2]) end
local last = not sent.err and sent[1]
if last and last[1] ~= id then redis.call('DEL', KEYS[2]) end
if stored and id ~= ARGV[2] and not (last and last[1] == id) then
  publish(KEYS[2], id, 'v', string.sub(stored, #id + 2))
end
return id
