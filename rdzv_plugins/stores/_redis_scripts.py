"""The Lua scripts of the redis backend: each is one atomic step on a run's hash."""

# KEYS[1] is the run's hash, KEYS[1 + i] the stream of the i-th key. Fields of the hash: "#n" the
# counter, "=<key>" a version, a space and the value, "!<key>" somebody waits for it. A version is
# the counter and the request's random tag. The counter starts at the server's time in microseconds:
# with the tag, a version of a server that lost its memory is not handed out again. The tag also
# tells a client whose answer was lost that the write it finds is its own.
#
# A stream only hands a value on: it ends by itself, and who waits makes it anew.
_PRELUDE = """
local hash, tag = KEYS[1], ARGV[1]
local function next_version()
  local number = redis.call('HINCRBY', hash, '#n', 1)
  if number == 1 then
    redis.call('PERSIST', hash)
    local now = redis.call('TIME')
    number = redis.call('HINCRBY', hash, '#n', string.format('%.0f', now[1] * 1000000 + now[2]))
  end
  return string.format('%.0f', number) .. '-' .. tag
end
local function publish(stream, version, field, value)
  local sent = redis.pcall('XADD', stream, 'MAXLEN', '1', version, field, value)
  if type(sent) == 'table' and sent.err then
    -- The stream outlived its run, or the server's clock went back: begin it anew.
    redis.call('DEL', stream)
    redis.call('XADD', stream, 'MAXLEN', '1', version, field, value)
  end
  redis.call('EXPIRE', stream, 60)
end
local function write(key, stream, value)
  local version = next_version()
  redis.call('HSET', hash, '=' .. key, version .. ' ' .. value)
  if redis.call('HEXISTS', hash, '!' .. key) == 1 then
    publish(stream, version, 'v', value)
  end
  return version
end
local function read(key)
  local stored = redis.call('HGET', hash, '=' .. key)
  if not stored then return '', nil end
  local space = string.find(stored, ' ', 1, true)
  return string.sub(stored, 1, space - 1), string.sub(stored, space + 1)
end
"""

SCRIPTS = {
    "compare_and_set": """
local key, expected, value = ARGV[2], ARGV[3], ARGV[4]
local version, current = read(key)
if version ~= expected then return {0, version, current} end
return {1, write(key, KEYS[2], value)}
""",
    "put": """
local version
for i = 2, #KEYS do version = write(ARGV[2 * i - 2], KEYS[i], ARGV[2 * i - 1]) end
return version
""",
    "add": """
local _, current = read(ARGV[2])
-- Redis counts in 64 bits, Lua in 53.
redis.call('HSET', hash, '#t', current or '0')
local counted = redis.pcall('HINCRBY', hash, '#t', ARGV[3])
local sum = redis.call('HGET', hash, '#t')
redis.call('HDEL', hash, '#t')
if type(counted) == 'table' then return redis.error_reply('NOTANUMBER') end
write(ARGV[2], KEYS[2], sum)
return sum
""",
    "delete": """
for i = 2, #KEYS do
  local key = ARGV[i]
  redis.call('HDEL', hash, '=' .. key)
  if redis.call('HDEL', hash, '!' .. key) == 1 then
    -- Wake the waiters, so that they say again that they wait.
    publish(KEYS[i], next_version(), 'd', '')
  end
end
""",
    "list": """
local prefix, fields, found = '=' .. ARGV[2], redis.call('HGETALL', hash), {}
local length = #prefix
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, length) == prefix then
    found[#found + 1] = string.sub(fields[i], 2)
    found[#found + 1] = fields[i + 1]
  end
end
return found
""",
    "wait": """
local key, known = ARGV[2], ARGV[3]
redis.call('HSET', hash, '!' .. key, '1')
-- A run to which nobody has written ends by itself; the first write forbids that.
if redis.call('HEXISTS', hash, '#n') == 0 then redis.call('EXPIRE', hash, 60) end
local version, current = read(key)
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
-- A stream may outlive its run by some seconds.
local stale = last and last[2][1] == 'v' and last[1] ~= version
if stale then redis.call('DEL', KEYS[2]) end
if current and version ~= known then
  if not last or last[1] ~= version then publish(KEYS[2], version, 'v', current) end
  return 1
end
return 0
""",
    "expire": """
for _, field in ipairs(redis.call('HKEYS', hash)) do
  if string.sub(field, 1, 1) == '!' then
    -- Never to live longer for it.
    redis.call('PEXPIRE', ARGV[3] .. string.sub(field, 2), math.min(ARGV[2], 60000))
  end
end
-- An empty run has a deadline too.
if tonumber(ARGV[2]) > 0 then next_version() end
redis.call('PEXPIRE', hash, ARGV[2])
""",
}
SCRIPTS = {name: _PRELUDE + body for name, body in SCRIPTS.items()}
