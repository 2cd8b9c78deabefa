-- Slurm's job_submit plugin: fills in an estimate's figures for a job whose script has a line
--   #GPUFARM {"model": "torchvision.models:resnet50", "inputs": [64, 3, 224, 224]}
-- with the fields of a request to /v1/estimate, all but the device. Copy it beside slurm.conf, and set
-- JobSubmitPlugins=lua there. `python -m farm.slurm` writes the table that it reads; docs/service.md describes both.
--
-- It reads only two lines or one local file: slurmctld never waits for an estimate. A directive that the table does not
-- have is noted for the daemon, and the job is submitted unchanged. After any failure here the job is also submitted
-- unchanged. A job that fits no GPU is refused only with GPUFARM_SLURM_REJECT=true.

local TABLE = os.getenv("GPUFARM_SLURM_TABLE") or "/var/lib/gpufarm/slurm.tsv"
local WANTED = os.getenv("GPUFARM_SLURM_WANTED") or (TABLE .. ".wanted")
local REJECT = os.getenv("GPUFARM_SLURM_REJECT") == "true"
local LONGEST_DIRECTIVE = 8192  -- bytes, without the blanks around it
local LONGEST_LINE = LONGEST_DIRECTIVE + 1024
local SEARCHED = 65536  -- bytes of a script, from its start
local MOST_WANTED = 1048576  -- bytes of the file of unknown directives: a daemon that stands still fills no disk
local HEADER = "^gpufarm%-slurm 1 (%S+)$"

local known, known_version = {}, nil

-- Return the text of the last #GPUFARM line near the script's start, without surrounding blanks; nil without one.
-- Lengths are checked first, and each pattern is anchored and matches in one way: the work is linear in SEARCHED.
-- The text has no control character, because a line of the table, which ends at "\n", holds it byte by byte.
function gpufarm_directive(script)
  local directive = nil
  for line in (script or ""):sub(1, SEARCHED):gmatch("[^\r\n]+") do
    if #line <= LONGEST_LINE and line:sub(1, 8) == "#GPUFARM" then
      local text = line:match("^[ \t]+([^ \t].*)$", 9)
      text = text and text:match("^.*[^ \t]")
      if text and #text <= LONGEST_DIRECTIVE and not text:find("%c") then directive = text end
    end
  end
  return directive
end

-- Return the table's rows by directive. The table is read again only if its first line has changed.
local function rows()
  local file = io.open(TABLE, "r")
  if not file then return known end
  local version = (file:read("*l") or ""):match(HEADER)
  if version and version ~= known_version then
    local fresh = {}
    for line in file:lines() do
      local gpus, fits, features, comment, directive = line:match("^(%d+)\t(%l+)\t([^\t]*)\t([^\t]*)\t(.*)$")
      if directive then fresh[directive] = {gpus = gpus, fits = fits, features = features, comment = comment} end
    end
    known, known_version = fresh, version
  end
  file:close()
  return known
end

local function want(directive)
  local file = io.open(WANTED, "a")
  if not file then return end
  if file:seek("end") < MOST_WANTED then file:write(directive, "\n") end
  file:close()
end

local function is_empty(value) return value == nil or value == "" end

-- Fill in the fields that the user left open. Returns a message for the user if the job is refused.
function gpufarm_fill_in(job)
  local directive = gpufarm_directive(job.script)
  if not directive then return nil end
  local row = rows()[directive]
  if not row then
    want(directive)
    return nil
  end
  if row.fits == "no" and REJECT then return row.comment end
  if is_empty(job.comment) then job.comment = row.comment end
  if row.fits ~= "yes" then return nil end
  if is_empty(job.gres) and is_empty(job.tres_per_job) and is_empty(job.tres_per_task) then
    job.gres = "gres:gpu:" .. row.gpus
  end
  if is_empty(job.features) and row.features ~= "" then job.features = row.features end
  return nil
end

function slurm_job_submit(job, _partitions, _user)
  local done, refused = pcall(gpufarm_fill_in, job)
  if not done then
    slurm.log_error("gpufarm: %s", tostring(refused))
  elseif refused then
    slurm.log_user("%s", refused)
    return slurm.ERROR
  end
  return slurm.SUCCESS
end

function slurm_job_modify(_job, _record, _partitions, _user)
  return slurm.SUCCESS
end

return slurm.SUCCESS
